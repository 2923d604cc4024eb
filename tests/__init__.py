"""The tests of tokenpipe. `tests/support` is what they are made with."""
