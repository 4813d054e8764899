"""The report of `python -m train gpu-report`: a GPU's speed and cost, in figures that buyers compare.

`figures.py` defines a figure and the file of figures. `section.py` defines `Bench`, the argument of each section. Each
section is a module with one function, `measure`.
"""
