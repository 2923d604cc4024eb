"""What the tests are made with: scripted sockets, a manual clock, certificates, the gateway as a process.

Both ends of an exchange are bare sockets, so that every byte and its time is the test's own, and nothing repairs it on
the way. `tests/test_support.py` tests these parts against each other.
"""
