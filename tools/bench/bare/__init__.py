"""What a bundle runs on a machine that has Python and NVIDIA's driver alone; only the standard library is
imported.
"""
