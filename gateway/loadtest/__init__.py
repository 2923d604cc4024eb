"""The load tester: schedule, data sets, client, statistics, results, comparison, report."""
