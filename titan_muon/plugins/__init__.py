"""Parts for one model or framework, and clipping, which nothing in the library imports."""
