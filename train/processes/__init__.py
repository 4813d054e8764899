"""The processes of a run: starting them, on one machine and on several; losing them; averaging their gradients."""
