"""What completions are worth: rewards on the host, advantages of them."""
