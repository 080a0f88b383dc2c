"use strict";
// The page of one run.
if (data.steps.length > 200) view.smoothing = 0.85; // a long run is noise otherwise
setUp(() => {
  showHeader();
  showCurves();
  showPhases();
  showSamples();
  showTable(byId("config"), data.config);
  showTable(byId("machine"), data.environment);
  showNotices();
});
