"""How the processes of a job find each other, keep watch over each other, and keep other jobs out of their folder."""
