"""DiffusionGemma Lab: instruments, measurements and pages for block-diffusion text generation.

Six rooms, imports run downwards only:

    runs      the `dglab` command, execution of notebooks, publishing
    report    results on disk, figures, verdicts, the canvas viewer
    engines   other ways to generate
    measure   timing, costs, batch invariance
    sampling  how a canvas is denoised, observed without disturbing it
    models    what is run: named shapes, loading

Nothing is imported here: `import dglab_utils` must stay cheap, because the command line checks its
arguments before it loads torch.
"""

__version__ = "0.1.0"
