"""What a device is asked, a question a file."""
