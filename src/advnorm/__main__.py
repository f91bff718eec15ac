"""``python -m advnorm``: the same command, for ``torchrun -m advnorm``."""

from advnorm.cli import main

if __name__ == "__main__":
    main()
