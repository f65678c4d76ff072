from .cli import bench

bench(prog_name="ipcsync bench")
