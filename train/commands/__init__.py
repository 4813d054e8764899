"""The commands of `python -m train`: each command is a module, whose function `main` receives the option values."""
