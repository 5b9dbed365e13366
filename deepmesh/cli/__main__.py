"""`python -m deepmesh.cli`: the same as `deepmesh`."""

from deepmesh.cli import main

main()
