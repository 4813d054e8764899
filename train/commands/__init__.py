"""The commands of `python -m train`: one module each, whose `main` receives the option values."""
