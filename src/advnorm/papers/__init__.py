"""The five papers: cells, printed numbers and claims, one module or package each."""
