"""What `python -m train NAME` runs: a module for each command, whose `main` gets what its command line gives."""
