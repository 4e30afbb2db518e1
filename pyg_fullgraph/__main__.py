"""`python -m pyg_fullgraph`."""

from pyg_fullgraph.cli import main

if __name__ == "__main__":
    main()
