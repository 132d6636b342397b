"""Export to other formats and runtimes; every export is run and compared with its source before it is kept."""
