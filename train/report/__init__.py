"""What is made of a finished run: the report with its plots, and the page on the trained classifier."""
