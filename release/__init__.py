"""What is published and how it is checked: ``python -m release --help``. It is no part of the package."""
