"""The run folder as plain files; needs neither torch nor any other package of this project."""
