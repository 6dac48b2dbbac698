"""Language models: one tensor table and a few pure functions of it."""
