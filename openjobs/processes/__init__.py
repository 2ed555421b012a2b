"""Background commands: each under a keeper that outlives the worker (keeper.py), as the ledger of tasks needs them."""
