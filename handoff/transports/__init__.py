"""Ways to move pieces of a registered pool between two nodes, behind one protocol (base.py)."""
