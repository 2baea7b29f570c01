"""Planning by modelled time: shapes, meshes and machines in, a plan and its numbers out."""
