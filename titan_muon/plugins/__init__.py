"""Parts for one model or framework, which nothing else imports."""
