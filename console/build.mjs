// Bundles src/ into the gateway's package data: `make console`.
// The manifest has a SHA-256 of the sources; tests/unit/gateway/test_console_assets.py computes it again.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../services/gateway/http/console/static");

function sources() {
  const top = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
  const inner = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)));
  return [...top, ...inner].sort();
}

function hashOfSources() {
  const hash = createHash("sha256");
  for (const name of sources()) {
    const body = readFileSync(join(here, name));
    hash.update(`${name}\0${body.length}\0`).update(body);
  }
  return hash.digest("hex");
}

const result = await build({
  entryPoints: { app: join(here, "src/main.tsx") },
  bundle: true,
  minify: true,
  write: false,
  target: "es2022",
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  outdir: out,
});

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const files = [];

function write(name, body) {
  writeFileSync(join(out, name), body);
  writeFileSync(join(out, `${name}.gz`), gzipSync(body, { level: 9 }));
  const quality = { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: body.length };
  writeFileSync(join(out, `${name}.br`), brotliCompressSync(body, { params: quality }));
  files.push(name);
}

function hashed(path, body) {
  const [stem, extension] = path.split("/").pop().split(".");
  return `${stem}-${createHash("sha256").update(body).digest("hex").slice(0, 12)}.${extension}`;
}

const names = {};
for (const file of result.outputFiles) {
  const body = Buffer.from(file.contents);
  const name = hashed(file.path, body);
  names[name.split(".").pop()] = name;
  write(name, body);
}
const icon = readFileSync(join(here, "src/icon.svg"));
names.svg = hashed("icon.svg", icon);
write(names.svg, icon);
const page = readFileSync(join(here, "src/index.html"), "utf8")
  .replace("app.css", names.css)
  .replace("app.js", names.js)
  .replace("icon.svg", names.svg);
write("index.html", Buffer.from(page));
const manifest = { sources: hashOfSources(), files: files.sort() };
writeFileSync(join(out, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
