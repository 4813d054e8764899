"""This project's console command `resnet-mxnet` (command.py)."""
