"""Runner: padding, model, engine loop and command line."""
