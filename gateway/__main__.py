"""`python -m gateway` is the command `tokenpipe`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
