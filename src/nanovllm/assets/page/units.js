// Sizes in words.

export function amount(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1024 && at < units.length - 1; at++) bytes /= 1024;
  return `${Number(bytes.toFixed(1))} ${units[at]}`;
}
