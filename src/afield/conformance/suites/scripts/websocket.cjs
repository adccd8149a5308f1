// A WebSocket class for versions of node that have none; its module is beside the suite's source.
globalThis.WebSocket ??= require(require.resolve('ws', { paths: [process.cwd()] }));
