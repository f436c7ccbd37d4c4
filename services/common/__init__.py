"""What any process needs to be a process. No LLM word in here."""
