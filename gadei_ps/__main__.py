"""`python -m gadei_ps`: the command line."""

from gadei_ps.cli.app import main

if __name__ == "__main__":
    main()
