"""deepmesh: the library that every process of the mesh imports, and the command line."""

__version__ = "0.1.0"
