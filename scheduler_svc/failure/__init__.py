"""What happens when something dies: runners that leave, a scheduler that comes back, requests that kill."""
