"""The reports on a finished run: pages with plots, and the page on the trained classifier."""
