"""What every layer stands on: errors, registries, distributed helpers. Imports torch and the standard library only."""
