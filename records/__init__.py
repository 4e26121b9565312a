"""The run folder as plain files, and what processes share; needs neither torch nor other
packages of this project.
"""
