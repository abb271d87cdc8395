"""Working on whole models: check, expand, fold, and files of them."""
