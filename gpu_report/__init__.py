"""What a GPU can do, as buyers compare GPUs: the sections of `python -m train gpu-report`, and what they find.

`figures.py` has the figures and the file that holds them; `section.py` what a section is given; each section is a
module with one function, `measure`.
"""
