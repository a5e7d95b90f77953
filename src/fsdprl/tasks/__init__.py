"""Small generated tasks with an exact reward, for the quickstart and the learning tests."""
