"""What text and pictures look alike by: terminals, tables, SVG."""
