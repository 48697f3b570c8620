"""The engine both node kinds share: schedule, run, update."""
