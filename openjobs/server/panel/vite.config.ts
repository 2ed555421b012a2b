import { defineConfig } from 'vitest/config';

// Relative addresses: a host may mount the panel under any prefix.
export default defineConfig({
  base: './',
  build: {
    outDir: '../static',
    emptyOutDir: true,
    target: 'es2022',
    // The strict Content-Security-Policy of the server allows no data: scripts and no inline module preload.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    sourcemap: false,
    // The licences of what is built in, for the wheel.
    license: { fileName: 'licenses.md' },
  },
  test: { environment: 'node', include: ['test/**/*.test.ts'] },
});
