"""The demo model: its training text, the training script and the model itself. Not part of the installed package."""
