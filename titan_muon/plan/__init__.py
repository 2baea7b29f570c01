"""Planning, without processes, devices or modules: shapes and meshes in, a Plan and its numbers out."""
