"""How a canvas is denoised, observed without disturbing it."""
