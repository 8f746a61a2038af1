"""Results on disk, figures, verdicts, the canvas viewer and the explorables."""
