"""What people see of a run: predicted beside measured, and the live progress bar."""
