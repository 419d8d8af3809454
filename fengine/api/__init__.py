"""What stands between a caller and the loop: SGLang's calls, their arguments checked, their results formatted."""
