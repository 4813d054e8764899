"""Its being here lets the tests in cuda/ import the modules of this folder."""
