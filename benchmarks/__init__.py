"""Measurements of the package's parts. README.md says what each measures and how long it takes."""
