"""The load tester's tests."""
